"""What is wrong with a machine or an installation, told without starting an engine; failures are values."""
