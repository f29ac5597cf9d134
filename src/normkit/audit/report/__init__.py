"""How an audit is shown."""
