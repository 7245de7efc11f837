"""The closed loop, pure: what is known of plans, admission, policies, and the controller that follows from them."""
