"""What a GPU allows and prefers."""
