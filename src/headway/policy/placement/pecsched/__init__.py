"""PecSched: short prefills go where nobody is, then beside a long decode, then in place of a long prefill."""
