"""The subcommands of `launcher`, and what they share."""
