"""Hook implementations of slapo-plan."""
