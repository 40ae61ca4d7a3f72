"""The command line. Every command is imported only when it is asked for."""
