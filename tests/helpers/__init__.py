"""Test doubles, virtual worlds and processes that several test modules share. Imported as `tests.helpers.NAME`."""
