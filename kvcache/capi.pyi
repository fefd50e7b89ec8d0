API: object  # PyCapsule
