"""Is everything on this machine as a run needs it? ``verl-war doctor`` says so, and what to do where it is not."""
