"""The tests; helpers shared by several of them are imported from here by their full name."""
