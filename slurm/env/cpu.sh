# A CPU cluster, and the test cluster. gloo's interface is found by the job (cluster.interface names it otherwise).
export no_proxy="127.0.0.1,localhost${no_proxy:+,$no_proxy}"  # engines are asked over loopback
ulimit -n "$(ulimit -Hn)" 2>/dev/null  # sockets: 64 streams an engine and more
