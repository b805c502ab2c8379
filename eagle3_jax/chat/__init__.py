"""Chats with a target: its template, and a conversation that remembers its turns."""
