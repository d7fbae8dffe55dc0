"""What a run, an experiment or a curvature measurement found, for people: self-contained HTML, short Markdown."""
