"""The page of the server, on which plain and speculative decoding run next to each other."""
