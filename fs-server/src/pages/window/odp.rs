//! A window by on-demand paging: a mapping that an RNIC follows ([`PointedMemory`], which is then registered).

use super::{PageWindow, Pointed, WindowLost};
use cuttlefs_common::memory::{PointError, PointedMemory};
use std::sync::Arc;

impl PageWindow for Arc<PointedMemory> {
    fn point(&self, changes: &[Pointed]) -> Result<(), WindowLost> {
        for change in changes {
            let pointed = PointedMemory::point(
                self,
                change.page.0 as usize,
                change.frame.map(|frame| frame.0 as usize),
            );
            match pointed {
                // The page stays magic: a READ of it costs one more RPC.
                Ok(()) | Err(PointError::Full { .. }) => {}
                Err(PointError::Kernel(source)) => {
                    return Err(WindowLost {
                        source,
                        advice: "raise vm.max_map_count: a process may have so many mappings, and a window takes two a page",
                    });
                }
            }
        }
        Ok(())
    }

    fn close(&self) {
        PointedMemory::close(self);
    }
}
