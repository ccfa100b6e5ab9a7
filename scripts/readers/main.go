// Reads an image by a Go module of the seekable format of zstd, and compares it with the raw bytes.
//
//	readers IMAGE RAW
//
// The reader has to know how long the memory is, and to find parts of it at any place.
package main

import (
	"bytes"
	"fmt"
	"io"
	"math/rand"
	"os"

	seekable "github.com/SaveTheRbtz/zstd-seekable-format-go/pkg"
	"github.com/klauspost/compress/zstd"
)

func main() {
	if err := check(os.Args[1], os.Args[2]); err != nil {
		fmt.Fprintln(os.Stderr, "zstd-seekable-format-go:", err)
		os.Exit(1)
	}
	fmt.Println("test result: ok. 1 passed: zstd-seekable-format-go")
}

// check fails unless the image has exactly the bytes of the raw file.
func check(image, raw string) error {
	expected, err := os.ReadFile(raw)
	if err != nil {
		return err
	}
	file, err := os.Open(image)
	if err != nil {
		return err
	}
	defer file.Close()
	decoder, err := zstd.NewReader(nil)
	if err != nil {
		return err
	}
	defer decoder.Close()
	reader, err := seekable.NewReader(file, decoder)
	if err != nil {
		return err
	}
	length, err := reader.Seek(0, io.SeekEnd)
	if err != nil {
		return err
	}
	if length != int64(len(expected)) {
		return fmt.Errorf("%d bytes, and not %d", length, len(expected))
	}
	places := rand.New(rand.NewSource(11))
	for range 50 {
		at := places.Intn(len(expected))
		size := min(1+places.Intn(300_000), len(expected)-at)
		found := make([]byte, size)
		if _, err := reader.Seek(int64(at), io.SeekStart); err != nil {
			return err
		}
		if _, err := io.ReadFull(reader, found); err != nil {
			return fmt.Errorf("%d bytes at %d: %w", size, at, err)
		}
		if !bytes.Equal(found, expected[at:at+size]) {
			return fmt.Errorf("%d bytes at %d differ", size, at)
		}
	}
	return nil
}
