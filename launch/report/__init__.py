"""report.html of a run: `data` reads the run directory, `figures` draws, `page` lays out."""
