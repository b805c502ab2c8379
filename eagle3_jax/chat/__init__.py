"""Chats with a target: its chat template, and a conversation that stores its turns."""
