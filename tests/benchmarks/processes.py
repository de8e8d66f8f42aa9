def rollout(): return []
def trainer(): return []
def sync(): return []
def step(): return []
