"""Modules that are broken on purpose, and clean ones. A line that the doctor must name ends in `# FIND rule`."""
