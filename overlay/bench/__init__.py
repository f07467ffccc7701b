"""The kernel against the limits of the GPU it runs on, and against its peers, all measured in one run."""
