"""Reads documents and chats, tokenizes them, and packs the tokens into rows."""
