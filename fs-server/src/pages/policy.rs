//! Region policies: TeRM, and the policies that it is compared with (TeRM sections 6.1 and 6.3), as three switches.
//!
//! | policy       | access     | promotes | one-sided reads                                    |
//! |--------------|------------|----------|----------------------------------------------------|
//! | `term`       | tiering    | yes      | magic pattern for pages on SSD                     |
//! | `pin`        | tiering    | no       | of everything: the memory is as large as the pool  |
//! | `odp`        | mapped     | no       | fault in the NIC engine                            |
//! | `rpc`        | mapped     | no       | none                                               |
//! | `rpc-buffer` | buffered   | no       | none                                               |
//! | `rpc-direct` | direct     | no       | none                                               |
//!
//! `rpc-direct` can be given the techniques of `term` one after another: tiering IO, hotspots, magic. With all three it is `term`.
//!
//! # Invariants
//! * All policies store the same bytes in the same places: a pool may be served under one today and another tomorrow.
//! * Only `tiering` uses frames; the others see every page on SSD.

use std::fmt;
use std::str::FromStr;

/// Why there is no such policy.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum PolicyError {
    /// There is no policy of this name.
    #[error("`{0}` is no region policy; give one of {names}", names = PolicyName::ALL.map(PolicyName::text).join(", "))]
    Unknown(String),
    /// There is no technique of this name.
    #[error("`{0}` is no technique; give tiering, hotspot or magic")]
    UnknownTechnique(String),
    /// Only `rpc-direct` takes techniques.
    #[error("--with belongs to --region rpc-direct; {0} takes no techniques")]
    NoTechniques(PolicyName),
    /// A given technique builds on another one that is not given.
    #[error(
        "--with takes `tiering`, `tiering,hotspot` or `tiering,hotspot,magic`: each technique builds on the one before"
    )]
    TechniqueLeftOut,
    /// Under this policy nothing faults in the NIC engine.
    #[error("--odp-hardware belongs to --region odp; {0} has no such faults")]
    NoFaults(RegionPolicy),
}

/// The name of a policy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum PolicyName {
    /// SSD-extended memory.
    #[default]
    Term,
    /// All of the pool in DRAM.
    Pin,
    /// One-sided reads that fault.
    Odp,
    /// RPCs that copy from mapped memory and fault.
    Rpc,
    /// RPCs through the kernel's page cache.
    RpcBuffer,
    /// RPCs that read and write the SSD.
    RpcDirect,
}

impl PolicyName {
    /// All policies.
    pub const ALL: [Self; 6] =
        [Self::Term, Self::Pin, Self::Odp, Self::Rpc, Self::RpcBuffer, Self::RpcDirect];

    const fn text(self) -> &'static str {
        match self {
            Self::Term => "term",
            Self::Pin => "pin",
            Self::Odp => "odp",
            Self::Rpc => "rpc",
            Self::RpcBuffer => "rpc-buffer",
            Self::RpcDirect => "rpc-direct",
        }
    }
}

impl fmt::Display for PolicyName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.text())
    }
}

impl FromStr for PolicyName {
    type Err = PolicyError;

    fn from_str(input: &str) -> Result<Self, Self::Err> {
        let known = Self::ALL.into_iter().find(|name| name.text() == input);
        known.ok_or_else(|| PolicyError::Unknown(input.to_owned()))
    }
}

/// A technique that `rpc-direct` can be given, in the order of TeRM's Figure 10.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Technique {
    /// Pages in DRAM are served from there.
    Tiering,
    /// Hot pages are promoted to DRAM, and cold ones are evicted.
    Hotspot,
    /// One-sided reads, with the magic pattern for pages on SSD.
    Magic,
}

impl FromStr for Technique {
    type Err = PolicyError;

    fn from_str(input: &str) -> Result<Self, Self::Err> {
        match input {
            "tiering" => Ok(Self::Tiering),
            "hotspot" => Ok(Self::Hotspot),
            "magic" => Ok(Self::Magic),
            _ => Err(PolicyError::UnknownTechnique(input.to_owned())),
        }
    }
}

/// How the server accesses a page.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Access {
    /// In its frame, or on SSD past the kernel's cache.
    Tiering,
    /// On SSD, past the kernel's cache.
    Direct,
    /// Through the kernel's cache, by read and write.
    Buffered,
    /// In the kernel's cache, by load and store.
    Mapped,
}

/// What one-sided reads see.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exposure {
    /// Frames, and the magic pattern in place of pages on SSD.
    Magic,
    /// Frames; each page has one.
    Pinned,
    /// The mapped pool; a page that is not in memory faults.
    Faulting,
    /// Nothing: there are no one-sided reads.
    Hidden,
}

/// How regions are served.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RegionPolicy {
    /// How the server accesses a page.
    pub access: Access,
    /// Whether pages move between SSD and frames after the start.
    pub promotes: bool,
    /// What one-sided reads see.
    pub exposure: Exposure,
    /// Whether reads that fault also wait as long as at an RNIC (`--odp-hardware`).
    pub hardware_times: bool,
}

impl Default for RegionPolicy {
    fn default() -> Self {
        Self::of(PolicyName::Term)
    }
}

impl RegionPolicy {
    /// The policy of this name.
    pub const fn of(name: PolicyName) -> Self {
        let (access, promotes, exposure) = match name {
            PolicyName::Term => (Access::Tiering, true, Exposure::Magic),
            PolicyName::Pin => (Access::Tiering, false, Exposure::Pinned),
            PolicyName::Odp => (Access::Mapped, false, Exposure::Faulting),
            PolicyName::Rpc => (Access::Mapped, false, Exposure::Hidden),
            PolicyName::RpcBuffer => (Access::Buffered, false, Exposure::Hidden),
            PolicyName::RpcDirect => (Access::Direct, false, Exposure::Hidden),
        };
        Self { access, promotes, exposure, hardware_times: false }
    }

    /// `rpc-direct` with the given techniques, which must be the first ones of Figure 10.
    ///
    /// # Errors
    /// `NoTechniques`, `TechniqueLeftOut`.
    pub fn with(name: PolicyName, techniques: &[Technique]) -> Result<Self, PolicyError> {
        if techniques.is_empty() {
            return Ok(Self::of(name));
        }
        if name != PolicyName::RpcDirect {
            return Err(PolicyError::NoTechniques(name));
        }
        let wanted = [Technique::Tiering, Technique::Hotspot, Technique::Magic];
        let mut given = techniques.to_vec();
        given.sort_unstable();
        if !wanted.starts_with(&given) {
            return Err(PolicyError::TechniqueLeftOut);
        }
        let has = |technique| given.contains(&technique);
        Ok(Self {
            access: Access::Tiering,
            promotes: has(Technique::Hotspot),
            exposure: if has(Technique::Magic) { Exposure::Magic } else { Exposure::Hidden },
            hardware_times: false,
        })
    }

    /// The same policy, whose page faults also take the time of an RNIC's.
    ///
    /// # Errors
    /// `NoFaults`.
    pub fn with_hardware_times(self) -> Result<Self, PolicyError> {
        if self.exposure != Exposure::Faulting {
            return Err(PolicyError::NoFaults(self));
        }
        Ok(Self { hardware_times: true, ..self })
    }

    /// Whether the policy uses frames.
    pub const fn uses_frames(&self) -> bool {
        matches!(self.access, Access::Tiering)
    }
}

impl fmt::Display for RegionPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (name, techniques) = match (self.access, self.exposure) {
            (Access::Tiering, Exposure::Pinned) => (PolicyName::Pin, ""),
            (Access::Tiering, Exposure::Hidden) if self.promotes => {
                (PolicyName::RpcDirect, " with tiering,hotspot")
            }
            (Access::Tiering, Exposure::Hidden) => (PolicyName::RpcDirect, " with tiering"),
            (Access::Tiering, _) => (PolicyName::Term, ""),
            (Access::Direct, _) => (PolicyName::RpcDirect, ""),
            (Access::Buffered, _) => (PolicyName::RpcBuffer, ""),
            (Access::Mapped, Exposure::Faulting) => (PolicyName::Odp, ""),
            (Access::Mapped, _) => (PolicyName::Rpc, ""),
        };
        write!(f, "{name}{techniques}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip_and_others_are_refused() {
        for name in PolicyName::ALL {
            assert_eq!(name.to_string().parse::<PolicyName>(), Ok(name));
            assert_eq!(RegionPolicy::of(name).to_string(), name.to_string());
        }
        let error = "numa".parse::<PolicyName>().expect_err("no policy");
        assert!(error.to_string().contains("rpc-buffer"), "{error}");
    }

    #[test]
    fn all_techniques_make_term_and_none_may_be_left_out() {
        use Technique::{Hotspot, Magic, Tiering};
        let with = |techniques: &[Technique]| RegionPolicy::with(PolicyName::RpcDirect, techniques);
        assert_eq!(with(&[Tiering, Hotspot, Magic]), Ok(RegionPolicy::of(PolicyName::Term)));
        assert_eq!(with(&[]), Ok(RegionPolicy::of(PolicyName::RpcDirect)));
        let tiering = with(&[Tiering]).expect("a policy");
        assert!(tiering.uses_frames() && !tiering.promotes && tiering.exposure == Exposure::Hidden);
        assert_eq!(tiering.to_string(), "rpc-direct with tiering");
        assert!(tiering.with_hardware_times().is_err());
        assert!(RegionPolicy::of(PolicyName::Odp).with_hardware_times().is_ok_and(|odp| odp.hardware_times));
        assert!(with(&[Magic]).is_err() && with(&[Tiering, Magic]).is_err());
        assert!(RegionPolicy::with(PolicyName::Pin, &[Tiering]).is_err());
    }
}
