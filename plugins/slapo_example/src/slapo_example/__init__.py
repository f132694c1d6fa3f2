"""The smallest real Slapo plugin: the primitive ``freeze`` and a hook that says what is frozen."""
