"""What every room may use: errors, untrusted input, files written whole, facts of the machine."""
