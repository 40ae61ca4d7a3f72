"""The live engine: a core loop that schedules, executes and updates, in a process of its own. No torch in here."""
