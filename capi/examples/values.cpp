// The handles as values of C++: nothing is closed by hand, and an error is an exception.

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <iostream>

#include "uzone.hpp"

int main() {
    try {
        auto options = uzone::sized<uzone_pool_options>();
        options.block_bytes = 1 << 20;
        auto pool = uzone::open<uzone::pool>(uzone_pool_open, 16 << 20, &options);
        {
            uzone::block first(pool, 1, 10000);
            auto *bytes = static_cast<unsigned char *>(first->address);
            if (std::any_of(bytes, bytes + first->len_bytes, [](unsigned char byte) { return byte != 0; })) {
                std::cerr << "a block is not zero\n";
                return 1;
            }
            std::memset(bytes, 1, first->len_bytes);
            uzone::block second(std::move(first)); // it is given back once
        }
        auto stats = uzone::sized<uzone_pool_stats>();
        uzone::check(uzone_pool_read_stats(pool, &stats));
        if (stats.used != 0 || stats.blocks != 16) {
            std::cerr << "a block was not given back\n";
            return 1;
        }

        // The region is closed before the zone, and the pin before the region.
        auto zone = uzone::open<uzone::zone>(uzone_zone_open);
        auto region = uzone::open<uzone::region>(uzone_region_open, 4 << 20, 0);
        uzone::check(uzone_region_bind(region, zone, nullptr));
        {
            uzone::pin pin(zone, uzone_region_address(region), 8192);
            if (uzone_region_unbind(region, 0) != -EBUSY) {
                std::cerr << "a pinned region was unbound\n";
                return 1;
            }
        }
        uzone::check(uzone_region_unbind(region, 0));

        uzone::open<uzone::lazy>(uzone_image_open, "/no/such/image", nullptr);
    } catch (const uzone::error &error) {
        std::cout << error.what() << '\n';
        return error.code() == -ENOENT ? 0 : 1;
    }
    std::cerr << "an image that does not exist was opened\n";
    return 1;
}
