"""Many ranks in virtual time, over the runtime's own dispatcher."""
