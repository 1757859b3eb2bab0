//! Writing cache lines back to the memory behind them: the one place with these instructions.
//!
//! `clwb` keeps the line in the cache, `clflushopt` throws it out; both are ordered only by the fence that follows.
//! `clflush` is ordered by itself and slower. The CPU is asked once which of them it has (CPUID leaf 7, EBX bits 24 and
//! 23; all of x86-64 has `clflush`). On other machines `msync` of the pages makes a DAX file persistent as the
//! architecture needs it.

/// Bytes of a cache line.
pub const LINE_LEN: usize = 64;

/// The instruction that writes lines back here, for status and benchmarks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)]
pub enum Instruction {
    Clwb,
    ClflushOpt,
    Clflush,
    Msync,
}

impl Instruction {
    /// Its name.
    pub const fn label(self) -> &'static str {
        match self {
            Self::Clwb => "clwb",
            Self::ClflushOpt => "clflushopt",
            Self::Clflush => "clflush",
            Self::Msync => "msync",
        }
    }
}

#[cfg(target_arch = "x86_64")]
mod machine {
    use super::{Instruction, LINE_LEN};
    use std::arch::asm;
    use std::sync::OnceLock;

    /// The best instruction that the CPU has.
    pub fn instruction() -> Instruction {
        static FOUND: OnceLock<Instruction> = OnceLock::new();
        *FOUND.get_or_init(|| {
            let highest = std::arch::x86_64::__cpuid(0).eax;
            let features = if highest < 7 { 0 } else { std::arch::x86_64::__cpuid_count(7, 0).ebx };
            if features & (1 << 24) != 0 {
                Instruction::Clwb
            } else if features & (1 << 23) != 0 {
                Instruction::ClflushOpt
            } else {
                Instruction::Clflush
            }
        })
    }

    /// Writes back every line of the range, then fences.
    ///
    /// # Safety
    /// `[start, start + len)` is mapped for as long as the call lasts.
    pub unsafe fn write_back(start: *const u8, len: usize) {
        let which = instruction();
        let first = start as usize & !(LINE_LEN - 1);
        let end = start as usize + len;
        for line in (first..end).step_by(LINE_LEN) {
            // SAFETY: the line overlaps the mapped range, and mappings are whole pages, so the line is mapped; the
            // instructions change no byte. The instruction was found in CPUID. They order after earlier stores to
            // the same line, which is all that is asked of each.
            unsafe {
                match which {
                    Instruction::Clwb => asm!("clwb [{}]", in(reg) line, options(nostack, preserves_flags)),
                    Instruction::ClflushOpt => {
                        asm!("clflushopt [{}]", in(reg) line, options(nostack, preserves_flags));
                    }
                    _ => asm!("clflush [{}]", in(reg) line, options(nostack, preserves_flags)),
                }
            }
        }
        // SAFETY: a fence touches no memory. Nothing after it, an acknowledgement above all, is seen before the
        // write-backs have reached the persistence domain.
        unsafe { asm!("sfence", options(nostack, preserves_flags)) };
    }
}

#[cfg(not(target_arch = "x86_64"))]
mod machine {
    use super::Instruction;

    /// Always `Msync`: other machines have no such instruction here.
    pub fn instruction() -> Instruction {
        Instruction::Msync
    }

    /// Syncs the pages of the range.
    ///
    /// # Safety
    /// `[start, start + len)` is mapped for as long as the call lasts.
    pub unsafe fn write_back(start: *const u8, len: usize) {
        let page = rustix::param::page_size();
        let first = start as usize & !(page - 1);
        let len = start as usize + len - first;
        // SAFETY: whole pages of a mapping that lives; msync changes no byte.
        let synced = unsafe { rustix::mm::msync(first as *mut _, len, rustix::mm::MsyncFlags::SYNC) };
        // It fails for ranges that are not mapped, which the caller ruled out, and for media errors, after which the
        // machine takes a memory error at the next load anyway.
        assert!(synced.is_ok(), "msync of mapped persistent memory: {synced:?}");
    }
}

pub use machine::{instruction, write_back};

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_alignment_is_written_back_and_nothing_changes() {
        let bytes: Vec<u8> = (0..1000u32).map(|index| index as u8).collect();
        for start in 0..130 {
            for len in [0, 1, 63, 64, 65, 500] {
                // SAFETY: the range is inside `bytes`.
                unsafe { write_back(bytes.as_ptr().add(start), len) };
            }
        }
        assert!(bytes.iter().enumerate().all(|(index, byte)| *byte == index as u8));
        assert!(!instruction().label().is_empty());
    }
}
