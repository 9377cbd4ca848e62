"""What a user says of inputs: sizes of open dimensions, and values of those that become constants."""
