"""The command line: one file per command, and the modules that commands share."""
