# The image of every pod: the agent is PID 1 and starts the job's processes.
#   docker build --build-arg EXTRA=cuda13 --tag registry.example/train:1 .
# BASE: any image with Python 3.11 or newer and its venv. EXTRA: cpu, cuda13 or tpu, others after a comma (cuda13,gcs).
# An index of your own: --secret id=pip,src=pip.conf
ARG BASE=python:3.12-slim

# What builds, and stays behind.
FROM ${BASE} AS tools
ARG EXTRA=cpu
RUN python3 -m venv /opt/pip
WORKDIR /opt/requirements
COPY pyproject.toml constraints.txt ./
RUN python3 -c "import tomllib; \
project = tomllib.load(open('pyproject.toml', 'rb'))['project']; \
extras = [project['optional-dependencies'][name] for name in ['train', 'digits', *'${EXTRA}'.split(',')]]; \
print(*sum(extras, project['dependencies']), sep='\n')" > requirements.txt

# Everything but this package: built again only when its requirements change. The root is read-only in a pod, so all is
# compiled now, and never held against files' times, which differ from one copy of a layer to the next.
FROM ${BASE} AS runtime
COPY --from=tools /opt/requirements/requirements.txt /opt/requirements/constraints.txt /opt/jaxlaunch/
RUN --mount=type=bind,from=tools,source=/opt/pip,target=/opt/pip --mount=type=secret,id=pip \
    export PIP_CONFIG_FILE=/run/secrets/pip PIP_NO_COMPILE=1 PIP_ROOT_USER_ACTION=ignore && \
    python3 -m venv --without-pip /opt/jaxlaunch && cd /opt/jaxlaunch && \
    /opt/pip/bin/pip --python bin/python install --quiet --constraint constraints.txt --requirement requirements.txt && \
    bin/python -m compileall -q -j 0 --invalidation-mode unchecked-hash lib

FROM runtime AS package
WORKDIR /src
COPY . .
RUN --mount=type=bind,from=tools,source=/opt/pip,target=/opt/pip --mount=type=secret,id=pip \
    export PIP_CONFIG_FILE=/run/secrets/pip PIP_NO_COMPILE=1 PIP_ROOT_USER_ACTION=ignore && \
    /opt/pip/bin/pip --python /opt/jaxlaunch/bin/python install --quiet --no-deps --prefix /opt/package . && \
    python3 -m compileall -q --invalidation-mode unchecked-hash /opt/package

FROM runtime
COPY --from=package /opt/package /opt/jaxlaunch
ENV PATH=/opt/jaxlaunch/bin:$PATH HOME=/tmp
USER 1000:1000
WORKDIR /tmp
ENTRYPOINT ["python", "-m", "launcher.agent"]
