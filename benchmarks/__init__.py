"""Speed and memory, shown by scripts: never by a test that looks at a clock."""
