"""The joint search of step settings (`tune --explore`)."""
