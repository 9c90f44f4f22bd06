"""The front door: recipes, the supervisor of local processes, the job, its progress and its report."""
