"""The launch request (launch file and flags), its checks, and the Accelerator that is made from it."""
