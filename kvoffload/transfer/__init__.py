"""MOVES bytes: submit and poll never wait."""
