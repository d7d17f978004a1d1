"""Memory before it is spent: estimate bytes, choose placements, plan a run, show the plan."""
