"""The Python API: what scripts and notebooks call. `from headway import simulate, LLM, …` resolves to the modules here.

Start with `simulation` and `llm`.

1. Every name is imported on first use: `import headway` loads neither numpy nor torch, and only `LLM` needs the extra
   `serve`.
2. No other package but the command line imports this one.
"""
