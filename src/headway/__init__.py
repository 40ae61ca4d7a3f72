"""Headway: chats and million-token documents from one model, exactly, without one waiting behind the other."""

__version__ = "0.1.0"
