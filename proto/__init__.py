"""Generated gRPC contracts (`proto.*_pb2`) and the one place that serves and dials them."""
