"""Leaves that every other part may import: problems, candidates, outcomes, the C ABI, and a process's memory."""
