//! Fabric handles: all ranks of a group use them, or none does.

use std::sync::Arc;

use symmem::World;
use symmem::cuda::{Gpu, Stream};
use symmem_sys::cuda::code;
use symmem_sys::cuda::fake::{Config, Fabric, Fake};
use symmem_testing::{Ranks, test_name};

use super::memory::check_peers_memory;
use super::multicast::{has_multicast, logged};
use super::{configured, ranks};

fn with(fabric: Fabric) -> Config {
    Config { fabric, ..Config::default() }
}

#[test]
fn ranks_that_all_can_use_fabric_handles() {
    for n in [1, 2, 3] {
        let drivers = configured(n, &vec![with(Fabric::Yes); n]);
        ranks(&drivers, |world, driver, gpu, _| {
            let (_, log) = logged(|| check_peers_memory(world, gpu));
            assert_eq!(log, "");
            let imports = driver.calls("cuMemImportFromShareableHandle");
            assert_eq!(driver.calls("import_fabric"), imports, "all of them");
            assert_eq!(imports, 2 * (n - 1), "pads and memory of each peer");
        });
    }
}

#[test]
fn processes_that_all_can_use_fabric_handles() {
    Ranks::new(2).run(test_name!(), |world| {
        let driver = Fake::new(vec![with(Fabric::Yes); 2]);
        check_peers_memory(&world, &Gpu::with_driver(driver.clone(), world.rank() as u32).unwrap());
        assert_eq!(driver.calls("import_fabric"), 2);
        assert_eq!(driver.calls("cuMemImportFromShareableHandle"), 2);
        drop(world);
        assert_eq!(driver.live(), [""; 0]);
    });
}

/// What any rank says is what the driver lets it do, not what its device claims.
#[test]
fn one_rank_that_cannot_leaves_all_with_descriptors() {
    for cannot in [Fabric::No, Fabric::NotPermitted] {
        let drivers = configured(3, &[with(Fabric::Yes), with(cannot), with(Fabric::Yes)]);
        ranks(&drivers, |world, driver, gpu, _| {
            let (_, log) = logged(|| check_peers_memory(world, gpu));
            let claims = cannot == Fabric::NotPermitted && world.rank() == 1;
            assert_eq!(log.lines().count(), if claims { 2 } else { 1 }, "{log}");
            assert!(log.contains("descriptors are used: the device of rank 1 has none"), "{log}");
            assert_eq!(driver.calls("import_fabric"), 0);
            let (_, log) = logged(|| check_peers_memory(world, gpu));
            assert_eq!(log, "", "told once");
        });
    }
}

#[test]
fn ranks_of_which_none_can_use_descriptors() {
    for (none, told) in [(Fabric::No, 0), (Fabric::NotPermitted, 1)] {
        let drivers = configured(2, &[with(none), with(none)]);
        ranks(&drivers, |world, driver, gpu, _| {
            let (_, log) = logged(|| check_peers_memory(world, gpu));
            assert_eq!(log.lines().count(), told, "{log}");
            assert_eq!(log.contains("no fabric handles on cuda:"), told == 1, "{log}");
            assert_eq!(log.contains("CUDA_ERROR_NOT_PERMITTED"), told == 1, "{log}");
            assert_eq!(driver.calls("import_fabric") + driver.calls("export_fabric"), 0);
        });
    }
}

#[test]
fn a_handle_that_leads_nowhere_leaves_all_with_descriptors() {
    for victim in 0..2 {
        let drivers = configured(2, &vec![with(Fabric::Yes); 2]);
        ranks(&drivers, |world, driver, gpu, _: &Stream| {
            if world.rank() == victim {
                driver.fail("import_fabric", 1, code::NOT_PERMITTED);
            }
            let (_, log) = logged(|| check_peers_memory(world, gpu));
            assert_eq!(log.lines().count(), 1, "{log}");
            assert!(log.contains("import_fabric failed"), "{log}");
            let (fabric, all) =
                (driver.calls("import_fabric"), driver.calls("cuMemImportFromShareableHandle"));
            assert_eq!((fabric, all), (1, 3), "tried with the pads, then descriptors");
        });
    }
}

#[test]
fn a_multicast_object_goes_the_way_of_the_memory() {
    for (fabric, by_fabric) in [(Fabric::Yes, true), (Fabric::No, false)] {
        let able = Config { multicast: true, ..with(fabric) };
        let drivers = configured(2, &[able.clone(), able]);
        ranks(&drivers, |world: &World, driver: &Arc<Fake>, gpu, _| {
            assert!(has_multicast(world, gpu));
            let (fabric, all) =
                (driver.calls("import_fabric"), driver.calls("cuMemImportFromShareableHandle"));
            assert_eq!((fabric, all), (if by_fabric { 3 } else { 0 }, 3));
        });
    }
}
