"""Jobs from Python: a function on two hosts, and a job that runs here or on a cluster.

Each process of the decorated function joins the others, as any program does. A call returns the
value of rank 0, or raises the exception of the rank that failed. The same works in the cell of a
notebook, where a handle shows its state.

`python examples/from_python.py` runs both on this machine; `python examples/from_python.py submit`
submits the second one to the cluster of your kubeconfig, with the image of its cluster defaults.
"""

import sys

import jaxlaunch


@jaxlaunch.job(hosts=2, accelerator="cpu")
def estimate_pi(samples):
    """Return four times the share of random points that are in a circle, over all devices."""
    import jax
    import jax.numpy as jnp

    jax.distributed.initialize()
    devices = jax.device_count()
    sharding = jax.sharding.NamedSharding(jax.make_mesh((devices,), ("devices",)), jax.P("devices"))
    shape = (devices, samples, 2)
    key = jax.random.key(0)
    points = jax.jit(lambda: jax.random.uniform(key, shape), out_shardings=sharding)()
    is_inside = jax.jit(lambda points: jnp.sum(points**2, axis=-1) < 1)(points)
    return {"pi": 4 * float(jnp.mean(is_inside)), "devices": devices}


if __name__ == "__main__":
    print(estimate_pi(100_000))
    job = jaxlaunch.Job(
        name="from-python",
        hosts=2,
        accelerator="cpu",
        command=["python", "-c", "import os; print('rank', os.environ['JAX_PROCESS_ID'])"],
    )
    handle = job.submit() if sys.argv[1:] == ["submit"] else job.run()
    handle.wait(timeout_s=600)
    print(handle.status().state, handle.logs(rank=1))
