"""Reports of studies: numbers from results, one `Report` made of them, and its renderers."""
