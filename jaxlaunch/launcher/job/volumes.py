"""The volumes of a job: the keys and types of each kind."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, Field, Tag

from jaxlaunch.launcher.job.introspection import Words, has_key
from jaxlaunch.launcher.job.names import AbsolutePath, ObjectName
from jaxlaunch.launcher.job.units import Quantity
from jaxlaunch.trainer.spec import Block, in_bucket


class Mounted(Block):
    """A volume, by its first key."""

    @property
    def name(self) -> str:
        """What `--volume NAME=DIR` calls it."""
        return str(getattr(self, next(iter(type(self).model_fields))))


class Claim(Mounted):
    """A PersistentVolumeClaim.

    ```yaml
    volumes:
      - {claim: runs, path: /runs}                   # checkpoints; ReadWriteMany for several hosts
      - {claim: data, path: /data, read_only: true}
    ```
    """

    claim: ObjectName = Field(description="the claim's name")
    path: AbsolutePath = Field(description="where it is mounted")
    read_only: bool = Field(False, description="mounted read-only")


class Bucket(Mounted):
    """A bucket, mounted as a folder.

    ```yaml
    platform: gke
    service_account: trainer  # whose permissions read the bucket
    volumes: [{bucket: "gs://team-data/images", path: /data, read_only: true}]
    ```
    """

    bucket: Annotated[
        str,
        Field(pattern=r"^(gs|s3)://[^\s/]+(/[^\s]*)?$"),
        AfterValidator(in_bucket),
        Words("a bucket such as gs://name or s3://name"),
    ] = Field(description="gs:// or s3://, with or without a folder")
    path: AbsolutePath = Field(description="where it is mounted")
    read_only: bool = Field(False, description="mounted read-only")

    @property
    def name(self) -> str:
        """Return the name of the bucket alone."""
        return self.bucket.partition("://")[2].partition("/")[0]


class Ephemeral(Mounted):
    """Scratch space that lives as long as the pod.

    ```yaml
    volumes: [{ephemeral: 200Gi, path: /scratch}]  # on the node's disk; empty in new pods
    ```
    """

    ephemeral: Quantity = Field(description="its size")
    path: AbsolutePath = Field(description="where it is mounted")

    @property
    def name(self) -> str:
        """Return the path with dashes."""
        return self.path.strip("/").replace("/", "-")


class SecretFiles(Mounted):
    """The keys of a Secret as files.

    ```yaml
    volumes: [{secret: tls, path: /etc/tls}]  # /etc/tls/ca.crt and so on, one file per key
    ```
    """

    secret: ObjectName = Field(description="the Secret's name")
    path: AbsolutePath = Field(description="where it is mounted")


class ConfigFiles(Mounted):
    """The keys of a ConfigMap as files.

    ```yaml
    volumes: [{configmap: settings, path: /etc/settings}]  # one file per key
    ```
    """

    configmap: ObjectName = Field(description="the ConfigMap's name")
    path: AbsolutePath = Field(description="where it is mounted")


Volume = Annotated[
    Annotated[Claim, Tag("claim")]
    | Annotated[Bucket, Tag("bucket")]
    | Annotated[Ephemeral, Tag("ephemeral")]
    | Annotated[SecretFiles, Tag("secret")]
    | Annotated[ConfigFiles, Tag("configmap")],
    has_key("claim", "bucket", "ephemeral", "secret", "configmap"),
]
