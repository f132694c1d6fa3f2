"""What this plugin registers."""
