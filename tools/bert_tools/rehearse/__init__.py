"""The tool `rehearse`."""
