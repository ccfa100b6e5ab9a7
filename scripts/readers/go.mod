module uzone/readers

go 1.25.0

require (
	github.com/SaveTheRbtz/zstd-seekable-format-go/pkg v0.10.0
	github.com/klauspost/compress v1.20.4
)

require (
	github.com/cespare/xxhash/v2 v2.3.0 // indirect
	golang.org/x/sync v0.20.0 // indirect
)
