"""The Python API: what scripts and notebooks call. `from headway import simulate, LLM, …` resolves to the modules here.

Every name is imported on first use: `import headway` brings neither numpy nor torch, and only `LLM` needs the extra
`serve`. Nothing below this package imports it.
"""
