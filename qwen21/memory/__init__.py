"""Memory of a run, before it starts: estimate bytes, choose placements, plan the run, show the plan."""
