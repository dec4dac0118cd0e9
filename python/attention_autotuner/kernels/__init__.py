"""The kernel families: for each its knobs, search space, rules, resources and cost model."""
