module jaxlaunch.test/cluster/pause

go 1.26
