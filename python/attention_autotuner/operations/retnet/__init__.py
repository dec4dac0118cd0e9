"""retnet."""
