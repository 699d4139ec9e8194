"""From configuration to manager and handlers."""
